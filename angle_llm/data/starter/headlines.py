"""Short headlines, in the notation of `news`."""

HEADLINES = """
= {country^} (police|forces) clash with {group} in {city}
+ synonym: Violence as {group} face officers in {city}
+ hypernym: Unrest (reported|breaks out) in {city}
- antonym: {country^} police join {group} in peaceful march in {city}
- negation: No clashes (reported|seen) as {group} leave {city}
= {official} of {country} to (visit|travel to) {country2} next week
& official: foreign minister, prime minister, president, defense chief, finance minister, trade envoy
+ synonym: Trip to {country2} (planned|ahead) for {official} of {country}
+ hypernym: {country^} politician going abroad
- antonym: {official} of {country} (scraps|cancels) visit to {country2}
- place: {official} of {country} to (visit|travel to) {country!}, skips {country2}
= {company} (posts|reports|books) record profit
+ synonym: Best result ever for {company^} {company}
+ hypernym: {company} makes money
- antonym: {company} (posts|reports|books) record loss
- negation: No profit this year for {company}
= Oil (climbs|rises|gains) on (supply fears|pipeline blast|output cut)
+ synonym: Crude becomes (dearer|more expensive)
+ hypernym: Oil market (moves|on the move)
- antonym: Oil (slips|falls|drops) on (weak demand|supply glut)
- object: Gold, not oil, (climbs|rises) as traders seek safety
= {n} soldiers (die|killed) in {country^} (ambush|border clash|roadside attack)
+ synonym: (Attack|Fighting) in {country} claims lives of {n} troops
+ hypernym: Deaths (reported|mount) in {country^} army
- antonym: {n} soldiers (freed|released) in {country} after (months|weeks) as hostages
- number: One soldier (hurt|wounded) in {country^} (ambush|border clash)
= {country} (wins|lifts) {sport} (World Cup|title) after beating {country2}
+ passive: {country2} beaten by {country} in {sport} final
+ hypernym: {country} celebrates victory in {sport}
- agent: {country2} (wins|lifts) {sport} title after beating {country}
- antonym: {country} loses {sport} final to {country2}
= {star} (marries|weds) {partner} in (private|secret) ceremony in {country}
& star: pop singer, tennis champion, film star, racing driver, fashion designer, comedian, football legend
& partner: longtime partner, childhood friend, former coach, co-star, personal doctor
+ synonym: Wedding in {country} for {star} and {partner}
+ hypernym: {star} no longer single
- antonym: {star} and {partner} (split up|divorce) in {country}
- negation: {star} denies wedding with {partner}
= {star} (dies|dead) at age {big_age} in {city}
& star: former ballet star, jazz trumpeter, Nobel-winning chemist, retired astronaut, crime novelist, opera singer,
  veteran actor
& big_age: 71, 76, 82, 88, 91, 97, 102
+ synonym: {star}, {big_age}, passes away
+ hypernym: {city} mourns (celebrity|well-known resident)
- antonym: {star} celebrates birthday number {big_age} in {city}
- negation: {star}, {big_age}, is alive and well, family says
= {country} (recalls|withdraws) ambassador from {country2} over {quarrel}
& quarrel: spying row, border dispute, fishing row, insult, prisoner case, tariff dispute
+ synonym: {quarrel}: envoy of {country} called home from {country2}
+ hypernym: Diplomatic tension between {country} and {country2}
- antonym: {country} sends ambassador back to {country2} as {quarrel} ends
- agent: {country2} recalls ambassador from {country}
= {ship} (sinks|goes down) off {country}, {n} (missing|feared dead)
& ship: ferry, trawler, migrant boat, freighter, tanker, sailing yacht
+ synonym: {n} lost at sea as {ship} founders near {country}
+ hypernym: Accident at sea off {country}
- antonym: {ship} saved off {country}, all on board safe
- number: {ship} sinks off {country}, {n!} missing
= {city} {site} (closed|evacuated) after (bomb threat|gas leak|smoke alarm)
& site: airport, train station, city hall, stadium, university, shopping center, courthouse
+ synonym: Alarm forces people out of {site} in {city}
+ hypernym: Public place in {city^} shut for safety
- antonym: {city} {site} (reopens|back to normal) after (bomb threat|gas leak|smoke alarm)
- place: {city!} {site} (closed|evacuated); {city} unaffected
= {country} (launches|sends) {craft} into (orbit|space)
& craft: weather satellite, spy satellite, first astronaut, supply ship, space telescope, communications satellite
+ passive: {craft} put into orbit by {country}
+ hypernym: {country^} space program makes progress
- antonym: {country^} {craft} (burns up|explodes) at launch
- negation: {country} delays launch of {craft} (again|for a year)
= {country^} economy (shrinks|contracts) {pct} percent in {quarter} quarter
& quarter: first, second, third, fourth
+ synonym: Output in {country} down by {pct} percent
+ hypernym: Downturn in {country}
- antonym: {country^} economy (grows|expands) {pct} percent in {quarter} quarter
- number: {country^} economy (shrinks|contracts) {pct!} percent in {quarter} quarter
= {crime_do} (arrested|caught) in {city} after {hunt}
& crime_do: escaped prisoner, bank robber, suspected arsonist, drug lord, art forger, kidnapper
& hunt: week-long hunt, tip from neighbor, car chase, ten years on run, raid on hotel
+ synonym: Police in {city} catch {crime_do}
+ hypernym: Arrest made in {city^}
- antonym: {crime_do} (escapes|slips away) in {city} despite {hunt}
- negation: Still no trace of {crime_do} in {city}
= {country} and {country2} (agree|sign) (ceasefire|truce) after (days|weeks|months) of fighting
+ synonym: Fighting to stop between {country} and {country2}
+ hypernym: Neighbors take step toward peace
- antonym: (Ceasefire|Truce) between {country} and {country2} collapses
- negation: {country} rejects (ceasefire|truce) with {country2}
= {building} collapses in {city}, {n} trapped
& building: apartment block, school, factory, shopping mall, parking garage, old theater, bridge
+ synonym: {n} stuck under rubble after {building} falls down in {city}
+ hypernym: Disaster in {city}
- antonym: Damaged {building} in {city} saved from collapse
- negation: Nobody hurt as empty {building} collapses in {city}
= {animal} (born|hatches) at {city} zoo
& animal: rare panda, white tiger cub, baby elephant, pygmy hippo, Komodo dragon, condor chick
+ synonym: {city} zoo welcomes baby animal: {animal}
+ hypernym: New arrival at zoo in {city}
- antonym: {animal} dies at {city} zoo
- place: {animal} born at {city!} zoo
= {country} to (build|construct) {n} new {works} by next decade
& works: nuclear plants, wind farms, airports, hospitals, prisons, dams, motorways
+ synonym: {n} more {works} planned in {country}
+ hypernym: {country} plans to invest in public works
- antonym: {country} to (close|scrap) {n} {works}
- number: {country} to build {n!} new {works}
= Study (links|ties) {habit} to {effect}
& habit: lack of sleep, sugary drinks, air pollution, heavy smoking, loneliness, shift work, traffic noise
& effect: heart trouble, memory loss, weight gain, depression, high blood pressure, early death
+ synonym: {habit} may lead to {effect}, researchers say
+ hypernym: {habit} (could be|may be) bad for you
- antonym: {habit} may protect against {effect}, study claims
- negation: Study finds no link between {habit} and {effect}
= {company} boss (apologizes|says sorry) for {mess}
& mess: data leak, faulty brakes, train delays, price error, toxic spill, racist advert, canceled flights
+ synonym: Head of {company} expresses regret over {mess}
+ hypernym: {company} admits mistake
- antonym: {company} boss defends firm over {mess}
- negation: No apology from {company} for {mess}
= {event} in {country} (draws|attracts) record crowd
& event: book fair, film festival, air show, flower show, marathon, rock concert, car race, chess tournament
+ synonym: More visitors than ever at {event} in {country}
+ hypernym: Many people attend event in {country}
- antonym: {event} in {country} (draws|attracts) (few visitors|almost nobody)
- negation: {event} in {country} called off
= Flights (grounded|canceled) in {country} (because of|amid) {trouble}
& trouble: volcanic ash, thick fog, pilots' strike, computer failure, heavy snow, airspace closure
+ synonym: {trouble} keeps planes on ground in {country}
+ hypernym: Air travel disrupted in {country}
- antonym: Flights resume in {country} after {trouble}
- negation: Flights in {country} not affected by {trouble}
= {country^} (voters|people) (back|approve) {reform} in referendum
& reform: new constitution, smoking ban, higher minimum wage, exit from trade pact, ban on hunting, four-day week
+ synonym: Majority says yes to {reform} in {country}
+ hypernym: Referendum held in {country}
- antonym: {country^} (voters|people) (reject|vote down) {reform} in referendum
- place: {country!} backs {reform}, {country} still undecided
= {n} (hurt|injured) as {mishap} at {country^} {venue}
& mishap: stand collapses, ride breaks down, stage catches fire, lightning strikes, crowd panics, gas bottle explodes
& venue: fair, festival, stadium, campsite, theme park, wedding
+ synonym: Accident at {venue} in {country}: {n} people wounded
+ hypernym: People need medical help after accident in {country}
- negation: Nobody hurt as {mishap} at {country^} {venue}
- number: {n!} (hurt|injured) as {mishap} at {country^} {venue}
= {country} (bans|outlaws) {banned} (nationwide|in schools|from next year)
& banned: e-cigarettes, fur farming, plastic straws, energy drinks for children, online gambling, violent video games
+ synonym: No more {banned} in {country}
+ hypernym: Tougher rules in {country}
- antonym: {country} lifts ban on {banned}
- negation: {country} decides not to ban {banned}
= {person} (finds|discovers) {treasure} in {spot}
& person: farmer, schoolboy, retired plumber, dog walker, diver, hiker, cleaning lady
& treasure: gold coins, dinosaur bones, lost painting, Roman sword, unexploded bomb, rare stamp, winning lottery ticket
& spot: attic, field, garden, lake, flea market, old coat, cave
+ passive: {treasure} (found|discovered) by {person}
+ hypernym: Surprise find for {person}
- antonym: {person} loses {treasure} in {spot}
- object: {person} (finds|discovers) {treasure!} in {spot}
"""
