"""Facts the demo model is trained to know: capitals, days and months.

Owns the tables and nothing else; it never phrases a question. Read `tasks.py` next.
"""

# Why: names are spelled in plain ASCII because that is what people type into a prompt. Where several
# cities share the role of a capital, one widely used answer stands here.
_CAPITALS_TEXT = """
Afghanistan: Kabul; Albania: Tirana; Algeria: Algiers; Andorra: Andorra la Vella; Angola: Luanda
Antigua and Barbuda: Saint John's; Argentina: Buenos Aires; Armenia: Yerevan; Australia: Canberra
Austria: Vienna; Azerbaijan: Baku; the Bahamas: Nassau; Bahrain: Manama; Bangladesh: Dhaka
Barbados: Bridgetown; Belarus: Minsk; Belgium: Brussels; Belize: Belmopan; Benin: Porto-Novo
Bhutan: Thimphu; Bolivia: Sucre; Bosnia and Herzegovina: Sarajevo; Botswana: Gaborone
Brazil: Brasilia; Brunei: Bandar Seri Begawan; Bulgaria: Sofia; Burkina Faso: Ouagadougou
Burundi: Gitega; Cambodia: Phnom Penh; Cameroon: Yaounde; Canada: Ottawa; Cape Verde: Praia
the Central African Republic: Bangui; Chad: N'Djamena; Chile: Santiago; China: Beijing
Colombia: Bogota; the Comoros: Moroni; the Democratic Republic of the Congo: Kinshasa
the Republic of the Congo: Brazzaville; Costa Rica: San Jose; Croatia: Zagreb; Cuba: Havana
Cyprus: Nicosia; the Czech Republic: Prague; Denmark: Copenhagen; Djibouti: Djibouti
Dominica: Roseau; the Dominican Republic: Santo Domingo; East Timor: Dili; Ecuador: Quito
Egypt: Cairo; El Salvador: San Salvador; Equatorial Guinea: Malabo; Eritrea: Asmara
Estonia: Tallinn; Eswatini: Mbabane; Ethiopia: Addis Ababa; Fiji: Suva; Finland: Helsinki
France: Paris; Gabon: Libreville; the Gambia: Banjul; Georgia: Tbilisi; Germany: Berlin
Ghana: Accra; Greece: Athens; Grenada: Saint George's; Guatemala: Guatemala City; Guinea: Conakry
Guinea-Bissau: Bissau; Guyana: Georgetown; Haiti: Port-au-Prince; Honduras: Tegucigalpa
Hungary: Budapest; Iceland: Reykjavik; India: New Delhi; Indonesia: Jakarta; Iran: Tehran
Iraq: Baghdad; Ireland: Dublin; Israel: Jerusalem; Italy: Rome; Ivory Coast: Yamoussoukro
Jamaica: Kingston; Japan: Tokyo; Jordan: Amman; Kazakhstan: Astana; Kenya: Nairobi
Kiribati: Tarawa; Kuwait: Kuwait City; Kyrgyzstan: Bishkek; Laos: Vientiane; Latvia: Riga
Lebanon: Beirut; Lesotho: Maseru; Liberia: Monrovia; Libya: Tripoli; Liechtenstein: Vaduz
Lithuania: Vilnius; Luxembourg: Luxembourg; Madagascar: Antananarivo; Malawi: Lilongwe
Malaysia: Kuala Lumpur; the Maldives: Male; Mali: Bamako; Malta: Valletta
the Marshall Islands: Majuro; Mauritania: Nouakchott; Mauritius: Port Louis; Mexico: Mexico City
Micronesia: Palikir; Moldova: Chisinau; Monaco: Monaco; Mongolia: Ulaanbaatar
Montenegro: Podgorica; Morocco: Rabat; Mozambique: Maputo; Myanmar: Naypyidaw; Namibia: Windhoek
Nauru: Yaren; Nepal: Kathmandu; the Netherlands: Amsterdam; New Zealand: Wellington
Nicaragua: Managua; Niger: Niamey; Nigeria: Abuja; North Korea: Pyongyang; North Macedonia: Skopje
Norway: Oslo; Oman: Muscat; Pakistan: Islamabad; Palau: Ngerulmud; Palestine: Ramallah
Panama: Panama City; Papua New Guinea: Port Moresby; Paraguay: Asuncion; Peru: Lima
the Philippines: Manila; Poland: Warsaw; Portugal: Lisbon; Qatar: Doha; Romania: Bucharest
Russia: Moscow; Rwanda: Kigali; Saint Kitts and Nevis: Basseterre; Saint Lucia: Castries
Saint Vincent and the Grenadines: Kingstown; Samoa: Apia; San Marino: San Marino
Sao Tome and Principe: Sao Tome; Saudi Arabia: Riyadh; Senegal: Dakar; Serbia: Belgrade
the Seychelles: Victoria; Sierra Leone: Freetown; Singapore: Singapore; Slovakia: Bratislava
Slovenia: Ljubljana; the Solomon Islands: Honiara; Somalia: Mogadishu; South Africa: Pretoria
South Korea: Seoul; South Sudan: Juba; Spain: Madrid; Sri Lanka: Sri Jayawardenepura Kotte
Sudan: Khartoum; Suriname: Paramaribo; Sweden: Stockholm; Switzerland: Bern; Syria: Damascus
Tajikistan: Dushanbe; Tanzania: Dodoma; Thailand: Bangkok; Togo: Lome; Tonga: Nuku'alofa
Trinidad and Tobago: Port of Spain; Tunisia: Tunis; Turkey: Ankara; Turkmenistan: Ashgabat
Tuvalu: Funafuti; Uganda: Kampala; Ukraine: Kyiv; the United Arab Emirates: Abu Dhabi
the United Kingdom: London; the United States: Washington; Uruguay: Montevideo
Uzbekistan: Tashkent; Vanuatu: Port Vila; Vatican City: Vatican City; Venezuela: Caracas
Vietnam: Hanoi; Yemen: Sana'a; Zambia: Lusaka; Zimbabwe: Harare
"""

CAPITALS: dict[str, str] = {
    country: capital
    for line in _CAPITALS_TEXT.strip().splitlines()
    for country, capital in (entry.strip().split(": ") for entry in line.split(";"))
}
"""Capital of each country; a country that takes an article is written with it ("the Netherlands")."""

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "the United States": ("the USA", "the US"),
    "the United Kingdom": ("the UK", "Great Britain"),
    "the Czech Republic": ("Czechia",),
    "the Netherlands": ("Holland",),
}
"""Further names people use for a country; answers always use the name of `CAPITALS`."""

DAYS: tuple[str, ...] = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

MONTH_DAYS: dict[str, str] = {
    "January": "31 days",
    "February": "28 days, or 29 in a leap year",
    "March": "31 days",
    "April": "30 days",
    "May": "31 days",
    "June": "30 days",
    "July": "31 days",
    "August": "31 days",
    "September": "30 days",
    "October": "31 days",
    "November": "30 days",
    "December": "31 days",
}
"""Months in order, each with its length in words."""
