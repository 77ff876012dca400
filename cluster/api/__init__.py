"""The HTTP face of a router: routes, schemas, errors, as OpenAI, vLLM and SGLang spell them."""
