"""Programs for people who work on Nightjar; the product imports none of them."""
