"""Reading files that may come from anybody: nothing is run, and little memory is taken."""
