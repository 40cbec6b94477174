"""When a request that has not come would start and end, and which deadlines can be promised."""
