"""From a request to its output: adapter, tokenizer, replica, connection, text, metrics."""
