"""What a streamed token costs the router, without a model and without Ray's processes."""
