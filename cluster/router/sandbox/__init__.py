"""What strangers send to be compiled or rendered, in processes that may end with it."""
