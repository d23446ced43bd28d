"""What you look at during or after a run: diagnosis, HTML report, tokens in the terminal."""
