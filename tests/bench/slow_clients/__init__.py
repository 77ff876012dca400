"""What clients that are idle, half done or slow do to one that is not, and when they are ended."""
