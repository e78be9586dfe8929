"""What happens when: the plan in use, what was sampled, gathers and reductions."""
