"""One request from its prompt to its output. Never runs a step."""
