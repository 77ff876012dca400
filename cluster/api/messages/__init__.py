"""Anthropic's Messages API: its bodies, the turns that they mean, and the events of its streams."""
