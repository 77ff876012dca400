"""One tensor-parallel rank: its step loop, its sequences, the server that takes plans."""
