"""Who calls with a token of an OpenID Connect issuer: its keys, its tokens, rules for claims."""
