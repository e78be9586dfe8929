"""Files and folders of a checkpoint: names, manifest, data files, what is complete."""
