"""What one tenant can find out about another, by answers and by time."""
