"""`izh bench peers`: other engines on the same work, each in its own Python, beside izh in the same run."""
