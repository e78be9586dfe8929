"""What benches and tests share: ranks, small models, and the plain training to compare with."""
