"""vLLM's own tests of its server, run against ours, and the page of what is served."""
