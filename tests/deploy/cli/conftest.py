"""A router with fake schedulers, for commands that talk to a server."""

from tests.cluster.conftest import model_dir, saying, serve, tokenizer

__all__ = ["model_dir", "saying", "serve", "tokenizer"]
