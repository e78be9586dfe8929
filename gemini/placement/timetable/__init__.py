"""What happens at which moment, in given homes. Pure."""
