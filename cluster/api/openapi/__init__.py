"""What /openapi.json says: declarations at the routes, and the document that is made of them."""
