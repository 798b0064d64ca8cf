"""The report of a run at any time: the facts on its page that artifacts do not hold, and the page's address."""
