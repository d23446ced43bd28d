"""Poise inside other people's trainers. Each module needs the framework that it is named after."""
