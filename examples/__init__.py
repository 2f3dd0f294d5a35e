"""Programs around Nightjar; a package, so that they find each other's modules by full name."""
