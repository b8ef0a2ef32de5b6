"""Keys, codes and problems in words."""
