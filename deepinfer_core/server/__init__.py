"""The OpenAI-compatible HTTP server: FastAPI in front of the engine, which runs on a thread of its own."""
