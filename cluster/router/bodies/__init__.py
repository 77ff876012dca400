"""JSON that strangers send: bounded before it is made, large bodies in another process."""
