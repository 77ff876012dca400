"""What one tenant feels of another that asks for ten times its share."""
