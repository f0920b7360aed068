"""The page: one file of HTML with all pictures of a run, for a report and for a live view."""
