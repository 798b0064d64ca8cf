"""The report's inputs, numbers, pictures, curves and page."""
