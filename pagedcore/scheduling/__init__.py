"""Who runs next: queues, policies, the pure planner, the transactional scheduler and its laws."""
