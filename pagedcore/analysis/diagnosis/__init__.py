"""Why a request waits, what to say of an engine that stands still, and the laws that hold after every step."""
