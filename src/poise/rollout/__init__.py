"""The interface of engines: requests, responses, sampling settings, random numbers."""
