"""What ranks say to each other: collectives, their log, meetings, ballots."""
