"""A CNN on 128×128 grayscale PNG files."""
