"""From a trained network to answers: for new rows, for other programs, step by step."""
