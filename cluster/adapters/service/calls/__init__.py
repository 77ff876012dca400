"""The methods of the pool's actor, by what they are about, and which of them run."""
