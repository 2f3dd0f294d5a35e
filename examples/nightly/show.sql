-- What each user is shown: the best candidate, and the line beside it.
SELECT r."user", p.name, p.cuisine, d.text AS line
FROM recommendations r
JOIN candidates c ON c."user" = r."user" AND c.place = json_extract(r.ranking, '$[0]')
JOIN products p USING (sku)
JOIN descriptions d USING (sku)
ORDER BY r."user";
