"""Adapters that come without a directory on the pool's host: uploads, hubs and buckets."""
