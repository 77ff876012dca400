"""Routes of models that give vectors, classes or scores in place of text."""
