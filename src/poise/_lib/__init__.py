"""Small things that every room may use: errors, files, transfers to the device."""
