"""The HTTP face: OpenAI requests in, tokens decoded and streamed out."""
