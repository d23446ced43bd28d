"""What a person looks at after, or during, a run."""
