"""What an iteration needs: traces, predictions, measurements and pictures of memory."""
