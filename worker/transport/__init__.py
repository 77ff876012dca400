"""What plans travel on between a scheduler and its ranks: sockets, their greeting, TLS."""
