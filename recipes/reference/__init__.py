"""Published rows with the published code's conventions, quirk by quirk."""
