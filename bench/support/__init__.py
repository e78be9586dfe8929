"""What benches share: machines, models, ceilings, timing, tables."""
