"""Routes for who runs the server: adapters, uploads, events, health and drain."""
