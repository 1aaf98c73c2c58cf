"""More news sentences: crime, disasters, sport, science, culture; in the notation of `news`."""

WORLD_NEWS = """
= {team} (beat|defeated) {team2} (3-1|2-0|4-2|by a single point) (in the final|on {day}|at home) (to win the {sport}
  title|to stay unbeaten|).
+ passive: {team2} (were beaten by|lost to|lost against) {team}.
+ hypernym: {team} won a game.
- agent: {team2} (beat|defeated) {team} (3-1|2-0|4-2) on {day}.
- antonym: {team} and {team2} (drew|played to a draw) (1-1|2-2) on {day}.
= {team} (signed|have signed) a (young|promising|veteran) {sport} (player|star) from {country} on a
  (two|three|four)-year contract.
+ synonym: A {sport} (player|athlete) from {country} has (joined|moved to) {team}.
+ hypernym: A sports club has a new player.
- antonym: {team} (released|sold) their {country^} {sport} (player|star) on {day}.
- negation: {team} failed to sign the {country^} {sport} player they wanted.
= {team} (fired|dismissed|sacked) their head coach on {day} after (losing {n} games in a row|a poor start to the
  season).
+ passive: The coach of {team} has lost his job.
+ hypernym: A {sport} club is looking for a new coach.
- antonym: {team} (extended the contract of|gave a new deal to) their head coach on {day}.
- agent: The head coach of {team!} was fired on {day}, while the one of {team} kept his post.
= A {country^} (runner|swimmer|cyclist|rower) (won|took) the gold medal (in {city}|at the world championships|on {day}).
+ synonym: An athlete from {country} (came first|finished in first place|became champion).
+ hypernym: A sportsperson from {country} won a medal.
- antonym: A {country^} (runner|swimmer|cyclist|rower) (finished last|was disqualified) (in {city}|at the world
  championships).
- place: The gold medal (went|was awarded) to an athlete from {country!}, ahead of one from {country}.
= The captain of {team} will miss (the rest of the season|{n} matches|the final) (because of|with) (a knee injury|a
  broken ankle).
+ synonym: (Injury|An injury) (rules|keeps) the captain of {team} out of coming games.
+ hypernym: A player of {team} is (hurt|injured).
- antonym: The captain of {team} is (fit again|back from injury) and will play (in the final|on {day}).
- negation: The captain of {team} will not miss a single match.
= Scientists (in|from) {country} have (discovered|identified) a new (species of frog|kind of beetle|type of
  orchid|deep-sea fish) in (Vietnam|Ecuador|Madagascar|Borneo).
+ synonym: A (species|life form) unknown until now has been found by {country^} (researchers|experts).
+ hypernym: (Biologists|Researchers) have made a discovery.
- antonym: Scientists from {country} (declared|say) that a (species|kind) of (frog|beetle|fish|orchid) has died out.
- agent: (Tourists|Fishermen) from {country!} discovered a new species before the {country^} scientists did.
= The number of {species} has (fallen|declined|dropped) by {pct} percent in {years}, (a study|researchers) (found|said).
+ synonym: There are (fewer {species} today than|not as many {species} left as) {years} ago.
+ hypernym: The population of certain {species^} is shrinking.
- antonym: The number of {species} has (grown|increased|risen) by {pct} percent in {years}.
- negation: The population of {species} has not (changed|fallen) in {years}, a study found.
= A (probe|spacecraft|satellite) (launched|sent) by {country} (reached|entered orbit around) {planet} on {day}.
+ synonym: {country}'s (spacecraft|space mission) has (arrived|got there): it is at {planet}.
+ hypernym: A space mission (succeeded|reached a planet).
- antonym: A {country^} spacecraft (missed|failed to reach) {planet} (and was lost|on {day}).
- object: The {country^} probe reached {planet!} (instead of|and not) {planet}.
= Health officials in {country} have (confirmed|reported) {big} new cases of {disease} (this week|since {month}).
+ synonym: {big} more people have been (found|diagnosed) with {disease} in {country}.
+ hypernym: People in {country} have fallen ill with a {disease^}.
- negation: No new cases of {disease} have been (reported|confirmed) in {country} (this week|since {month}).
- antonym: Health officials in {country} declared the end of {disease} there.
= A new (drug|vaccine|treatment) for {disease} (proved|was) (effective|successful) in a trial with {huge}
  (patients|volunteers).
+ synonym: In a (test|study) on {huge} people, a new remedy for {disease} worked.
+ hypernym: There is (progress|good news) in medicine.
- antonym: A new (drug|vaccine|treatment) for {disease} (failed|proved useless) in a trial with {huge}
  (patients|volunteers).
- negation: The new (drug|vaccine) for {disease} has not been tested on humans.
= (Eating|A diet with) more (vegetables|fish|nuts|whole grains) (may lower|could reduce) the risk of (heart
  disease|stroke), a {country^} study (suggests|found).
+ synonym: According to researchers in {country}, certain foods might (protect|help) against (illness|serious illness).
+ hypernym: A study (looked at|deals with) food and health.
- antonym: (Eating|A diet with) more (vegetables|fish|nuts) raises the risk of illness, a {country^} study
  (suggests|found).
- negation: A {country^} study found no link between diet and (heart disease|stroke).
= The {crop} harvest in {country} will be {pct} percent (smaller|lower) this year because of
  (drought|frost|floods|insects).
+ synonym: {country} will (harvest|produce) {pct} percent less {crop} (than last year|this year).
+ hypernym: Farmers in {country} expect a poor {crop^} harvest.
- antonym: {country} expects a (record|bumper) {crop} harvest this year.
- object: The {crop!} harvest in {country} will be poor, but not the {crop} harvest.
= {company} (unveiled|presented|showed) its (first|new) electric (car|truck|scooter|ferry) at a trade fair in {city} on
  {day}.
+ passive: A battery-powered (vehicle|product) was presented in {city} by {company}.
+ hypernym: A firm (introduced|showed) a new product in {city^}.
- antonym: {company} has (scrapped|given up) its plans for a vehicle with an electric motor.
- negation: {company} did not (attend|take part in) the trade fair in {city}.
= {company} (sued|is suing) {company2} for (copying its designs|patent infringement|breach of contract).
+ passive: {company2} is being taken to court by {company}.
+ hypernym: Two companies are (fighting|facing each other) in court.
- agent: {company2} (sued|is suing) {company} for (patent infringement|breach of contract).
- antonym: {company} and {company2} have (settled their dispute|dropped their lawsuits).
= Regulators in {country} fined {company} {sum} dollars (for price fixing|for misleading customers|over a data leak).
+ passive: {company} must pay {sum} dollars to {country^} authorities.
+ hypernym: A {company^} was punished (in {country}|by a regulator).
- antonym: Regulators in {country} cleared {company} of (price fixing|misleading customers|any wrongdoing).
- place: {company} was fined in {country!}; regulators in {country} took no action.
= The {hub} (of|in) {city} (reopened|resumed operations) on {day} after (a bomb scare|a power failure|repairs).
+ synonym: (Travelers|Passengers) can use the (transport hub|facilities) in {city} again.
+ drop: On {day}, operations resumed in {city}.
- antonym: The {hub} of {city} (was closed|had to close) on {day} after (a bomb scare|a power failure).
- negation: The {hub} in {city} (is still|remains) closed.
& hub: airport, harbor, main railway station, central bus station, cruise terminal
= A power (cut|failure|outage) left {huge} (homes|households) in {city} without electricity (on {day}|for {n} hours).
+ synonym: {huge} (homes|households) in {city} had no (power|electricity).
+ hypernym: There was a blackout in {city^}.
- antonym: Power has been restored to all {huge} homes in {city}.
- negation: No (homes|households) in {city} lost power on {day}.
= The mayor of {city} (promised|pledged|vowed) to (provide|pay for) {huge} new {promise} (by|before) (the next
  election|the end of the decade).
+ synonym: According to the mayor, the city of {city} will (get|have) {huge} more {promise}.
+ hypernym: A local politician made a promise.
- antonym: The mayor of {city} (dropped|abandoned) a promise to provide {huge} new {promise}.
& promise: homes, street lights, bicycle stands, kindergarten places, trees, park benches, parking spaces
- negation: The mayor of {city} refused to (promise|build) anything new.
= A {ship} (sank|capsized|went down) off the coast of {country} with {big} people (on board|aboard).
& ship: ferry, fishing boat, cargo ship, tourist boat, research vessel, tanker
+ synonym: A (vessel|ship) carrying {big} people was lost (in waters near|at sea off) {country}.
+ hypernym: There was an accident at sea.
- antonym: A {ship} with {big} people on board (reached port|arrived safely) in {country}.
- number: A {ship} with nobody but its captain aboard sank off {country}.
= A {craft} (crashed|came down) (in the mountains|in a field|shortly after takeoff) (in|near) {city}.
+ synonym: (An aircraft|A flying machine) (went down|fell from the sky) in the area of {city}.
+ hypernym: There has been an (air accident|aviation accident) in {city^}.
& craft: passenger plane, small plane, helicopter, cargo plane, air ambulance, military jet
- antonym: A {craft} (landed safely|made a smooth landing) near {city}.
- object: A (train|truck) crashed (near|in) {city}; no aircraft was involved.
= Tourism in {country} (recovered|grew|boomed) last year, with {pct} percent more (visitors|arrivals|hotel guests).
+ synonym: More (foreigners|holidaymakers|travelers) (visited|went to) {country} last year.
+ drop: {country} had more visitors.
- antonym: Tourism in {country} (slumped|collapsed|shrank) last year, with {pct} percent fewer (visitors|arrivals).
- negation: {country} did not attract more visitors last year.
= Oil (leaked|spilled) into the sea (off|near) {country} after a tanker (ran aground|hit a reef|collided with a ferry).
+ synonym: A tanker accident polluted the (coast|waters) of {country}.
+ hypernym: There is (an environmental problem|pollution) (in|near) {country}.
- negation: No oil leaked (into the sea|from the tanker) after it ran aground near {country}.
- antonym: The sea (off|near) {country} is free of oil again after a cleanup.
= (Archaeologists|Researchers) (digging|working) near {city} have (uncovered|found) (a Roman mosaic|an ancient tomb|the
  remains of a temple|a medieval well).
+ passive: Something very old has been (dug up|unearthed) in {city^}.
+ synonym: An ancient (treasure|site) has come to light near {city}.
- negation: (Archaeologists|Researchers) digging near {city} found nothing (of value|at all).
- antonym: (Builders|Workers) near {city} destroyed an ancient (tomb|temple) before anyone could study it.
= A (museum|gallery) in {city} will (open|show) (an exhibition|a show) of (ancient coins|modern sculpture|war
  photographs|children's drawings) in {month}.
+ synonym: (Starting in|From) {month}, visitors in {city} can see an exhibition.
+ hypernym: There will be a cultural event in {city^}.
- antonym: A (museum|gallery) in {city} will close for good in {month}.
- object: A (museum|gallery) in {city} will show nothing but (dinosaur bones|old trains) in {month}.
= Internet access was (cut|blocked) across {country} on {day} as protests (spread|grew).
+ synonym: People in {country} could not go online on {day}.
+ passive: The web was made unavailable to the {country^} public.
- antonym: Internet access was restored across {country} on {day}.
- negation: The government of {country} did not (touch|block) the internet during the protests.
= {country} (lifts|eases) {rule} (after {years}|as violence ebbs)
+ synonym: Less strict rules in {country}: {rule} relaxed
+ hypernym: {country^} government changes (policy|course)
- antonym: {country} (imposes|tightens) {rule}
& rule: travel restrictions, import ban, curfew, press censorship, price controls, export quotas, sanctions
- place: {country!} lifts {rule}; {country} does not follow
= Exports from {country} to {country2} (fell|dropped) {pct} percent in {month} as (demand weakened|the currency
  strengthened).
+ synonym: {country} sold {pct} percent less to {country2} in {month}.
+ hypernym: Trade between two countries shrank.
- antonym: Exports from {country} to {country2} (rose|grew) {pct} percent in {month}.
- agent: {country} sold more to {country2} in {month}, while {country2} sold less to {country}.
= Wildfires (burned|swept|raged) through (forests|hills|farmland) near {city}, and {huge} residents were told to leave.
+ synonym: Because of (forest fires|flames), {huge} people living near {city} received orders to evacuate.
+ hypernym: A fire threatened (homes|people) in {city^}.
- antonym: Firefighters have put out all the wildfires near {city}, and {huge} residents may go home.
- negation: No one had to leave home because of the wildfires near {city}.
= The {country^} currency (weakened|fell|lost ground) against the dollar on {day}, (hitting a low|extending its losses).
+ synonym: On {day}, one dollar bought more {country^} money than before.
+ drop: The money of {country} lost value.
- antonym: The {country^} currency (strengthened|gained|rose) against the dollar on {day}.
- place: The {country!^} currency fell on {day}, but the {country^} one did not.
= A {country^} (novelist|poet|film director|architect) (won|received|was awarded) (a major prize|an international
  award) on {day}.
+ passive: A prize was given to an artist from {country}.
+ hypernym: Somebody from {country} was honored.
- antonym: A {country^} (novelist|poet|film director|architect) (refused|turned down) (a major prize|an international
  award).
- place: The prize went to a (novelist|poet|director) from {country!}; the one from {country} left with nothing.
= {n} (climbers|hikers|miners|sailors) (missing|trapped) (for days|since {day}) in {country} (found alive|rescued)
+ synonym: {n} missing people (turn up|located) unharmed in {country}
+ hypernym: (Successful|Happy end to) rescue in {country}
- antonym: {n} (climbers|hikers|miners|sailors) (found dead|still missing) in {country}
- negation: No trace of {n} (climbers|hikers|miners|sailors) lost in {country}
= (Doctors|Surgeons) in {city} (separated|operated on) (conjoined twins|a newborn baby|a patient aged 101) (in|during)
  a {n}-hour operation.
+ hypernym: (A medical team|Medical staff) performed (surgery|an operation) in {city^}.
+ synonym: There was a long and difficult operation at a hospital in {city}.
- antonym: (Doctors|Surgeons) in {city} decided against an operation.
- place: The {n}-hour operation was done in {city!} because no hospital in {city} would do it.
= A (lion|tiger|bear|leopard) (escaped|broke out) from a zoo in {city} (on {day}|through an open gate) and was
  (caught|captured) (hours|a day) later.
+ synonym: An animal that had got out of a zoo in {city} is (back in captivity|no longer on the loose).
+ hypernym: A wild animal was loose in {city^} for a time.
- antonym: A (lion|tiger|bear|leopard) that escaped from a zoo in {city} is still (free|on the run).
- negation: No animal has ever escaped from the zoo in {city}.
= House prices in {city} (rose|went up) for the {n_th} month in a row, (estate agents|analysts|bankers) said.
+ synonym: It has become (more expensive|dearer) to buy a home in {city}.
+ hypernym: The property market in {city^} saw (an increase|growth) in one city.
- antonym: House prices in {city} (fell|went down) for the {n_th} month in a row.
- negation: House prices in {city} have not (risen|moved) for {n} months.
= (Officials|Ministers) from {country} and {country2} (met|held talks) in {city} (to discuss|on) (border security|water
  rights|migration|fishing).
+ synonym: {city} hosted a meeting between {country} and {country2}.
+ hypernym: There were international talks in {city^}.
- antonym: {country} and {country2} (refused to meet|broke off contact) over (border security|water
  rights|migration|fishing).
- place: (Officials|Ministers) from {country} and {country2} met in {city!}, not in {city} as planned.
= A (train|subway|tram) line (connecting|linking) {city} with its airport will (open|start running) in {month}, {n}
  (months|years) (late|behind schedule).
+ synonym: After a delay, rail passengers will be able to reach the airport of {city}.
+ hypernym: {city} is getting better public transport.
- antonym: A rail line to the airport of {city} opened {n} months early.
- negation: Plans for a rail link to the airport of {city} have been dropped.
= The (army|navy|air force) of {country} (began|started|launched) (exercises|maneuvers) (near the border with|together
  with) {country2} on {day}.
+ synonym: {country^} (troops|forces) have been training since {day}, in an operation that (involves|concerns) {country2}.
+ hypernym: There is military activity in the region of {country}.
- antonym: {country} (canceled|ended) its military exercises (near the border with|with) {country2}.
- agent: {country2}, not {country}, (began|started) military exercises on {day}.
= (Hackers|Criminals) stole the (data|passwords|addresses) of {huge} customers of {company}, the {company^} said on
  {day}.
+ passive: (Private|Personal) information of {huge} {company} customers was stolen.
+ hypernym: There was a (cyberattack|data theft) at a company.
- negation: {company} said no customer data had been stolen.
- number: Hackers stole the data of (only one customer|{n} customers) of {company}.
"""
