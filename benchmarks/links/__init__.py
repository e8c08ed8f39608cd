"""All-reduce between hosts whose links have a known rate: how much of the link is used."""
