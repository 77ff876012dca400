"""From the first signal to the last process: how a server of its own ends, whatever dies."""
