"""Commands on changed inputs: each ends with a result or one sentence, and does nothing that it should not."""
