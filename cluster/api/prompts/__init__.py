"""From what a body holds to the tokens of its prompts."""
