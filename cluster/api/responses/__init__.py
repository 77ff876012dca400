"""OpenAI's Responses API: bodies, items, events and what is kept of a response."""
